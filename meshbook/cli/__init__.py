"""The command `meshbook`: a REPL on a mesh, notebooks and scripts run headless, meshes listed and stopped, a doctor."""
