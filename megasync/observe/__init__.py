"""What a run shows and leaves behind: live display, metrics files, learning curve, sample answers, logs.

It sees everything and decides nothing; a run without this room would train the same.
"""
