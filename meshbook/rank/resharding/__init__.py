"""DTensors, and the models of FSDP2 that are made of them, cut anew in place when the mesh is resized."""
