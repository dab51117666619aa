"""`orch init`: what a project needs to be launched, found out and written as files."""
