"""The words that processes say to each other, and how they travel."""
