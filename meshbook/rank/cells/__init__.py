"""Running cells on a rank: its IPython shell, how a cell is compiled and run, and what replaces a terminal."""
