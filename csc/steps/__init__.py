"""The steps of the pipeline, a file each: the function of the file's name is what a component calls.

It has plain inputs and file outputs, and can be called from a test, a component or a notebook; calling it twice gives
the same outputs and no duplicate. What else a file offers is a part of its step that runs in another process, or that a
command needs.

Arguments of one name mean the same in every step:

    origin          the data, from `ingest`, as JSON
    scenario, task  name, for instance `voc-b0c4`, and number of the task, from 1
    config_json     settings; `config` once they are read
    split           `split.json` of the task
    train_view, test_view, metrics, scores, evidence    files of the task, as `csc.artifacts` lists them
    model           model folder
    prior           `registered.json` of the task before; empty for the base task
    features        uri of cached feature maps, from `embed`, that the head reads instead of images; or empty
    out, *_out      file or folder to write
"""
