"""How hosts are started: on this machine, or through an external launcher."""
