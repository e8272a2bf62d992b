"""Programs compiled ahead of time, on a machine that need not have the device they run on."""
