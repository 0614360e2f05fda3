"""The files of `megasync init`: a folder with a run of one's own, from one of a few templates.

`templates` has the table of templates, and puts the files of one together from the folder `parts`; `model` finds out
what a named model needs; `folder` writes the files, all or none; `commented` writes a configuration with the sentences
of the schema; `translated` makes the files of a translation (`megasync.translate`) instead.
"""

from megasync.starters.commented import commented
from megasync.starters.folder import check_folder, write_run
from megasync.starters.model import SMALL, Model, find_model
from megasync.starters.templates import (
    CONFIG,
    DEFAULT,
    TEMPLATES,
    Template,
    check_model,
    find_template,
    next_steps,
    run_files,
    run_name,
)
from megasync.starters.translated import after_translation, translated_files

__all__ = [
    "CONFIG",
    "DEFAULT",
    "SMALL",
    "TEMPLATES",
    "Model",
    "Template",
    "after_translation",
    "check_folder",
    "check_model",
    "commented",
    "find_model",
    "find_template",
    "next_steps",
    "run_files",
    "run_name",
    "translated_files",
    "write_run",
]
