"""The steps of the pipeline, a file each: the function of the file's name is what a component calls.

It has plain inputs and file outputs, and can be called from a test, a component or a notebook; calling it twice gives
the same outputs and no duplicate. What else a file offers is a part of its step that runs in another process, or that a
command needs.
"""
