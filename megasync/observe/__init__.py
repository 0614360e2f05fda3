"""What a run displays and records: live view, metrics files, learning curve, sample answers, logs.

This package only observes: training is the same without it.
"""
