"""Configuration: units, the table of settings, loading from file, environment and flags, SOURCE arguments.

    units.py      text <-> bytes and seconds (pure)
    source.py     SOURCE arguments of commands (pure, but for the check of a folder)
    settings.py   THE table of settings and the shapes of the YAML file
    load.py       file < environment < flags, with the origin of each value
    reference.py  the tables of the README

Nothing is imported here: pydantic takes longer to import than `fusecache --help` may take.
"""
