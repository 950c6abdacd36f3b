"""What ranks hold differently, and where numbers stop being finite."""
