"""The door for programs written for `monarch.actor`: the same names, imported from `meshbook.actor`."""
