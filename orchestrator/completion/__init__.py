"""Completing a command line in bash, zsh and fish: what a word can become, without the network and without the command
line's own libraries, which take longer to import than a key may take.

`table` holds the commands and options as plain data, made from the app by `make` and held equal to it by a test.
`words` reads a line by it, `values` knows what a place, a run or a recipe can be, `shells` speaks with each shell.
"""
