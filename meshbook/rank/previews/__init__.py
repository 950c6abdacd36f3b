"""What a rank says of its values without sending them: previews, digests, completion and inspection."""
