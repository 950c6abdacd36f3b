"""The command `meshbook`: a REPL, headless notebooks and scripts, listing and stopping meshes, diagnostics."""
