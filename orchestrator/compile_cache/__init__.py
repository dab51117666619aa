"""The compile cache as the workstation sees it: what it is known by, what is kept here, how it comes to a place."""
