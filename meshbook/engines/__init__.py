"""How hosts are reached: on this machine, or through somebody else's launcher."""
