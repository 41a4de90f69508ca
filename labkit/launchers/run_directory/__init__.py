"""The folder through which ranks on other machines and the notebook exchange what they have to say.

`directory` names its files, `records` is their format, `sender` writes them on a rank and `reader` reads them in the
notebook. `files` and `growing` are what supervisors need of it, without torch; `private` keeps other users out.
"""
