"""The runtime of actors in a process: mailboxes, ordered messages, endpoints."""
