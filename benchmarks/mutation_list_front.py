"""Mistakes in what a user reads first: devices, secrets, pages, names."""

from __future__ import annotations

from mutation import Mutation

FOREIGN_NAMES = ("tests/config/test_foreign_names.py",)
TABLES = ("tests/tracking/test_tables.py",)
SWEEP = ("tests/config/test_sweep.py", "-k", "one_folder or empty_name")
TABLE = ("tests/migrate/test_table.py",)
OUTPUT = ("tests/train/test_output.py",)
REFERENCES = ("tests/config/test_references.py",)
DEVICES = ("tests/config/test_devices.py",)

FRONT = [
    Mutation(
        "a run starts on GPUs that are not here",
        "preflight/devices.py",
        "    if no_gpu_here(run, devices):\n        fix",
        "    if False:\n        fix",
        DEVICES,
    ),
    Mutation(
        "a run for more GPUs than there are starts",
        "preflight/devices.py",
        "placement.num_devices > devices.num_gpus:",
        "placement.num_devices > 9 * devices.num_gpus:",
        DEVICES,
    ),
    Mutation(
        "idle GPUs are not said",
        "preflight/devices.py",
        "elif used < devices.num_gpus:",
        "elif used < devices.num_gpus - 5:",
        DEVICES,
    ),
    Mutation(
        "a job of a sweep is taken to have all GPUs of the machine",
        "preflight/devices.py",
        "if limit is not None and here.num_gpus:",
        "if limit is None and here.num_gpus:",
        DEVICES,
    ),
    Mutation(
        "a machine that is not here is planned as one without GPUs",
        "launch/ray_cluster.py",
        ' and (device == "cpu" or count > 0)',
        "",
        ("tests/launch/test_environment.py",),
    ),
    Mutation(
        "the damaged configuration of a stage is a traceback",
        "cli/execute.py",
        "        run = load(RunFolder(folder).config)\n    except UserError as error:",
        "        run = load(RunFolder(folder).config)\n    except KeyError as error:",
        DEVICES,
    ),
    Mutation(
        "a job of Slurm that fails ends as one that succeeded",
        "sweeps/slurm_jobs.py",
        "        if code:  # below 0",
        "        if code < 0:  # below 0",
        ("tests/launch/test_slurm_command.py",),
    ),
    Mutation(
        "a secret of the environment is a value",
        "config/references.py",
        "    if not is_plain(name, value):",
        "    if False:",
        REFERENCES,
    ),
    Mutation(
        "a number of a secret name is a value",
        "config/references.py",
        "    if SECRET_NAMES.search(name):\n        return False\n",
        "",
        REFERENCES,
    ),
    Mutation(
        "a reference to a path of elsewhere is read",
        "config/references.py",
        'value.startswith("/") and os.path.exists(value)',
        'value.startswith("/")',
        REFERENCES,
    ),
    Mutation(
        "the configuration of a foreign run reads the environment",
        "config/record.py",
        "    with guarded_environment():\n",
        "    if True:\n",
        (*REFERENCES, "-k", "foreign_run_folder"),
    ),
    Mutation(
        "a file of flags is resolved before the command line",
        "composition/config_file.py",
        "OmegaConf.to_container(loaded)",
        "OmegaConf.to_container(loaded, resolve=True)",
        REFERENCES,
    ),
    Mutation(
        "a wrong reference in a setting of Hydra is a traceback",
        "preflight/jobs.py",
        "except InterpolationResolutionError as error:",
        "except KeyboardInterrupt as error:",
        REFERENCES,
    ),
    Mutation(
        "checkpoints inside the folder of a model send it elsewhere",
        "train/output.py",
        "if keep is not None and is_within(keep, path) and filled(made, path, run, keep):",
        "if False:",
        OUTPUT,
    ),
    Mutation(
        "files of the user beside checkpoints are replaced by a model",
        "train/output.py",
        "if not has_room or (there and not is_own(path, [run], keep)):",
        "if not has_room:",
        OUTPUT,
    ),
    Mutation(
        "a delivery that was killed between its files is foreign",
        "train/output.py",
        " or (keep is not None and was.keys() > there.keys())",
        "",
        OUTPUT,
    ),
    Mutation(
        "checkpoints inside the folder of a model count as files of others",
        "preflight/inspections/outputs.py",
        "each.name not in kept or any(files(each, keep))",
        "True",
        ("tests/config/test_outputs.py", "-k", "inside_the_folder"),
    ),
    Mutation(
        "a table shows what a flag became before later rules changed it",
        "migrate/table.py",
        'return f"{key}={new.flags[key]}"',
        "return text",
        TABLE,
    ),
    Mutation(
        "a table forgets what is lost of a flag",
        "migrate/table.py",
        ", *map(lost, trace.lost)]",
        "]",
        TABLE,
    ),
    Mutation(
        "a table shows the key of Weights & Biases",
        "migrate/table.py",
        "if trace.name in SECRETS else",
        "if False else",
        TABLE,
    ),
    Mutation(
        "the remedy for a renamed flag keeps the value that is called otherwise",
        "config/names.py",
        "meant(new, value) or spelled(",
        "spelled(",
        FOREIGN_NAMES,
    ),
    Mutation(
        "the remedy for a renamed flag does not quote its value",
        "config/names.py",
        "words if PLAIN.fullmatch(words) else quoted(words)",
        "words",
        FOREIGN_NAMES,
    ),
    Mutation(
        "explain lists the flags of models that the run lacks",
        "cli/explain.py",
        " if row[0] not in idle)",
        ")",
        ("tests/config/test_explain.py",),
    ),
    Mutation(
        "a chat may be longer than its model was made for",
        "models/chat_model.py",
        "config.max_len or min(LONGEST, limit or LONGEST)",
        "config.max_len or LONGEST",
        ("tests/models/test_chat_model.py",),
    ),
    Mutation(
        "an answer in a chat may fill all positions of the model",
        "preflight/inspections/model_uses.py",
        "length=run.chat.max_new_tokens + 1)",
        "length=run.chat.max_new_tokens)",
        ("tests/config/test_inspections.py", "-k", "answer_in_a_chat"),
    ),
    Mutation(
        "a sweeper that is not installed is a misspelt preset",
        "composition/compose.py",
        'if key == "hydra/sweeper":',
        "if False:",
        FOREIGN_NAMES,
    ),
    Mutation(
        "a flag in a table is broken as any word",
        "tracking/tables.py",
        "return flag.end() + 1 if",
        "return BREAKABLE if",
        TABLES,
    ),
    Mutation(
        "columns of a table end at the edge of a narrow console",
        "tracking/tables.py",
        "console.width = max(console.width, sum(widths) + 3 * len(widths) + 1)",
        "pass",
        TABLES,
    ),
    Mutation(
        "jobs of a sweep with one folder are started",
        "preflight/jobs.py",
        "if result.is_sweep and jobs > 1:",
        "if result.is_sweep and jobs > 2:",
        SWEEP,
    ),
    Mutation(
        "an empty name is the current folder",
        "preflight/jobs.py",
        "if not str(hydra[name].dir):",
        "if False:",
        SWEEP,
    ),
    Mutation(
        "a wrong setting of logging is a traceback",
        "cli/execute.py",
        "except (ValueError, TypeError, AttributeError, ImportError) as error:  # those",
        "except ImportError as error:  # those",
        (*DEVICES, "-k", "logging"),
    ),
    Mutation(
        "own code cannot read keys of the environment any more",
        "config/references.py",
        "        if not GUARDS:\n",
        "        if GUARDS:\n",
        REFERENCES,
    ),
    Mutation(
        "an interval is left out of a sweep without a word",
        "preflight/jobs.py",
        "if not each.is_discrete_sweep()]",
        "if each.is_discrete_sweep() is None]",
        ("tests/config/test_sweep.py", "-k", "without_end"),
    ),
    Mutation(
        "the remedy for a renamed flag has a value that it does not take",
        "config/names.py",
        "if known is None and (is_odd or",
        "if False and (is_odd or",
        FOREIGN_NAMES,
    ),
]
