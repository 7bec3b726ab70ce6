"""`strata demo`: the main job on this machine alone, with a simulated provider in the place of a paid one.

`scenes` are the conversations, `run` drives them straight and through Strata, `show` prints what happened.
"""
