"""Mistakes on ranks that split the matrices or the tokens of a model, and in training by torch alone."""

from __future__ import annotations

from mutation import Mutation

WORLD = ("tests/train/test_world.py",)
PLAN = ("tests/train/test_tensor_parallel.py", "-k", "refused")
STEPS = ("tests/train/test_tensor_parallel.py", "-m", "not proof", "-k", "clipped and fp32 and (ZeRO-0 or ZeRO-2)")
INSPECTIONS = ("tests/config/test_inspections.py", "-k", "tensor_parallelism")
TORCH = ("tests/train/test_torch_engine.py", "-k", "added_up or own_master or too_small")
OVERLAP = ("tests/train/test_overlap.py", "-k", "zero_1")
CPU_ADAM = ("tests/train/test_cpu_adam.py", "-k", "updates")
NO_COMPILER = ("tests/train/test_cpu_adam.py", "-k", "without_a_compiler")
DEEPCOMPILE = ("tests/train/test_deepcompile.py", "-m", "not gpu")
COMPILED_RULES = ("tests/config/test_mistakes.py", "-k", "deepcompile")
SPLIT_SHAPES = ("tests/train/test_other_shapes.py", "-k", "tensor and ZeRO-0 and ZeRO-3")
RUNS = ("tests/e2e/test_tensor_parallel_runs.py", "-k", "sft and not data")
RUNS_ON_FOUR = ("tests/e2e/test_tensor_parallel_runs.py", "-k", "distill and data")
ON_NODES = ("tests/engines/test_engine_on_nodes.py",)
PLACES = ("tests/launch/test_reserve_nodes.py",)
HEADS = ("tests/models/test_sequence_parallel.py", "-k", "heads_for_every_rank")

PARALLEL = [
    Mutation(
        "ranks that split matrices drop other activations",
        "distributed/mesh.py",
        "return rank // self.tensor",
        "return rank",
        WORLD,
    ),
    Mutation(
        "layers whose plan has other ways to split are split all the same",
        "train/tensor_parallel.py",
        "if not plan or other or sees:",
        "if not plan or sees:",
        PLAN,
    ),
    Mutation(
        "heads are split that the ranks do not divide",
        "train/tensor_parallel.py",
        "if value is not None and value % size:",
        "if value is not None and size % value:",
        PLAN,
    ),
    Mutation(
        "the preflight takes the matrices of a mixture of experts for divisible",
        "preflight/inspections/models.py",
        'if experts is not None or files.setting("vision_config") is not None:',
        'if files.setting("vision_config") is not None:',
        INSPECTIONS,
    ),
    Mutation(
        "the preflight looks at no width of a model",
        "preflight/inspections/models.py",
        "if isinstance(size, int) and size % use.tensor:",
        "if isinstance(size, int) and size < use.tensor:",
        INSPECTIONS,
    ),
    Mutation(
        "the norm counts the gradients of whole parameters once per rank that splits matrices",
        "train/tensor_parallel.py",
        "if p.grad is not None and (is_first or is_shard(p))",
        "if p.grad is not None",
        STEPS,
    ),
    Mutation(
        "ulysses splits key/value heads over ranks that do not divide them",
        "models/sequence_parallel.py",
        "(pairs % self.size and self.size % pairs)",
        "pairs > heads",
        HEADS,
    ),
    Mutation(
        "without DeepSpeed the gradient of a micro-batch replaces the sum of those before",
        "train/torch_engine.py",
        "master.grad += gradient",
        "master.grad = gradient.float()",
        TORCH,
    ),
    Mutation(
        "without DeepSpeed a bf16 weight is its own master",
        "train/torch_engine.py",
        "p: p if p.dtype == torch.float32 else p.detach().float() for p in trained",
        "p: p for p in trained",
        TORCH,
    ),
    Mutation(
        "gradients are reduced after every micro-batch",
        "train/step.py",
        "last=number == len(micro_batches)",
        "last=True",
        OVERLAP,
    ),
    Mutation(
        "ZeRO-3: a whole matrix beside split ones is taken to be divided over fewer ranks than it is",
        "train/parts.py",
        "return torch.distributed.get_rank(group=parameter.ds_process_group)",
        "return torch.distributed.get_rank() // 2",
        SPLIT_SHAPES,
    ),
    Mutation(
        "ZeRO-3: the parts of a whole matrix that ranks of another tensor index have are not read",
        "train/parts.py",
        "if is_own or name not in split:",
        "if is_own:",
        SPLIT_SHAPES,
    ),
    Mutation(
        "DeepSpeed's AdamW in host memory has betas of its own",
        "train/strategy.py",
        "lr=adam.lr, betas=adam.betas, eps=adam.eps",
        "lr=adam.lr, eps=adam.eps",
        CPU_ADAM,
    ),
    Mutation(
        "ds.cpu_adam means the other AdamW",
        "train/strategy.py",
        'self.ds.adam_offload and self.ds.cpu_adam == "deepspeed"',
        'self.ds.adam_offload and self.ds.cpu_adam == "torch"',
        CPU_ADAM,
    ),
    Mutation(
        "a machine without a compiler ends a run with a traceback",
        "train/strategy.py",
        """DeepSpeedCPUAdam(optim.parameter_groups(module, config), lr=adam.lr, betas=adam.betas, eps=adam.eps)
    except RuntimeError as error:""",
        """DeepSpeedCPUAdam(optim.parameter_groups(module, config), lr=adam.lr, betas=adam.betas, eps=adam.eps)
    except ValueError as error:""",
        NO_COMPILER,
    ),
    Mutation(
        "ds.deepcompile is not said to DeepSpeed",
        "train/settings.py",
        'config["compile"] = {"deepcompile": True}',
        'config["compile"] = {"deepcompile": False}',
        DEEPCOMPILE,
    ),
    Mutation(
        "compiled graphs do not know which backward pass is the last",
        "train/settings.py",
        "return ds.deepcompile or (ds.zero_stage == 1 and ds.overlap_comm)",
        "return ds.zero_stage == 1 and ds.overlap_comm",
        DEEPCOMPILE,
    ),
    Mutation(
        "the CPU is taken to compile graphs",
        "config/rules/zero.py",
        'if run.launch.device == "cpu":',
        'if run.launch.device == "cuda":',
        COMPILED_RULES,
    ),
    Mutation(
        "a model on ranks that split matrices is exported with one rank's parts",
        "train/strategy.py",
        "with gathered(self.ds, parameters), tensor_parallel.whole(parameters):",
        "with gathered(self.ds, parameters):",
        RUNS,
    ),
    Mutation(
        "a run on ranks that split matrices counts each token once per rank",
        "distributed/world.py",
        "return self._reduce(tensor, dist.ReduceOp.SUM, self.mesh.data, self.data_ranks)",
        "return self._reduce(tensor, dist.ReduceOp.SUM, self.mesh.size, None)",
        RUNS,
    ),
    Mutation(
        "groups that split matrices get each other's parts of a batch",
        "distributed/mesh.py",
        "return rank // (self.sequence * self.tensor)",
        "return rank % self.data",
        RUNS_ON_FOUR,
    ),
    Mutation(
        "an engine on nodes: workers of two machines sum through the memory of one",
        "engines/nodes.py",
        'f"{meeting}?node={self.node()}"',
        "meeting",
        ON_NODES,
    ),
    Mutation(
        "an engine on nodes: a dead worker leaves the engine alive",
        "engines/nodes.py",
        """            except RayActorError:
                return True""",
        """            except RayActorError:
                return False""",
        ON_NODES,
    ),
    Mutation(
        "an engine on nodes: the engine takes the device of its first worker",
        "launch/placement.py",
        "replace(first, num_cpus=0.0, num_gpus=0.0, gpus=here, workers=workers)",
        "replace(first, gpus=here, workers=workers)",
        PLACES,
    ),
    Mutation(
        "an engine on nodes: a worker is told the GPUs of all nodes",
        "launch/placement.py",
        "gpus=gpus[node]) for slot, node in zip(",
        "gpus=sum(gpus.values(), ())) for slot, node in zip(",
        PLACES,
    ),
    Mutation(
        "an engine that a node could hold is spread over two without a word",
        "launch/placement.py",
        "if len(slots) <= max(per_node.values()):",
        "if len(slots) < 0:",
        PLACES,
    ),
]
