"""The steps of the pipeline: one file, one public function each, plain inputs and file outputs.

A step can be called from a test, a component or a notebook; calling it twice gives the same outputs and no duplicate.
"""
