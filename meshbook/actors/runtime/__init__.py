"""An actor's life on its rank: mailbox, messages in order, endpoints."""
