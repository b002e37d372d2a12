"""Saved values: arrays and numbers by name, in safetensors files that appear whole or not at all.

``entries`` names values of the program, ``files`` holds their bytes, ``index`` says which file of a folder holds which
elements, ``disk`` and ``folders`` make files and folders appear, ``together`` makes an error of one rank an error of
all.  ``Layer.save`` writes one file, ``tg.distributed.save`` a folder with a file of each rank.
"""
