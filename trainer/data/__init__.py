"""From files to batches: sources and chat make documents, rows packs them, batches orders them and finds the labels."""
