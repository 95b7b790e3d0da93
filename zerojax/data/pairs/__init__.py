"""Examples with answers, for fine-tuning.

This sub-room holds files of examples, prompt and chat templates, and tasks, which turn examples into rows of tokens whose labels are
the answers. It holds rewards of answers too.
It knows no model and no stage: a decoder and an encoder-decoder differ in the arrays of a row.
To read another format of files, extend `records`; to add a task, add it to `tasks.TASKS`.
"""
