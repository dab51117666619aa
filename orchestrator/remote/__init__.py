"""Programs that run at the place: standard library only, Python 3.8 and later, sent there as one zipapp."""
