"""What an actor's class is made of: `Actor`, `@endpoint`. Known to callers and to ranks."""
