"""Every mistake that the page lists, room by room."""

from __future__ import annotations

from mutation_list_agents import AGENTS
from mutation_list_border import BORDER
from mutation_list_config import CONFIG
from mutation_list_damage import DAMAGE
from mutation_list_data import DATA
from mutation_list_early import EARLY
from mutation_list_failures import FAILURES
from mutation_list_foreign import FOREIGN
from mutation_list_front import FRONT
from mutation_list_images import IMAGES
from mutation_list_launch import LAUNCH
from mutation_list_limits import LIMITS
from mutation_list_migrate import MIGRATE
from mutation_list_numbers import NUMBERS
from mutation_list_pages import PAGES
from mutation_list_parallel import PARALLEL
from mutation_list_rewards import REWARDS
from mutation_list_rl import RL
from mutation_list_rl_step import RL_STEP
from mutation_list_rollout import ROLLOUT
from mutation_list_rows import ROWS
from mutation_list_sandbox import SANDBOX
from mutation_list_schedules import SCHEDULES
from mutation_list_steps import STEPS
from mutation_list_train import TRAIN
from mutation_list_verdicts import VERDICTS

MUTATIONS = [
    *STEPS,
    *RL,
    *ROLLOUT,
    *RL_STEP,
    *REWARDS,
    *SANDBOX,
    *DATA,
    *TRAIN,
    *LAUNCH,
    *CONFIG,
    *AGENTS,
    *SCHEDULES,
    *IMAGES,
    *PARALLEL,
    *FAILURES,
    *DAMAGE,
    *NUMBERS,
    *ROWS,
    *BORDER,
    *VERDICTS,
    *FOREIGN,
    *MIGRATE,
    *LIMITS,
    *PAGES,
    *FRONT,
    *EARLY,
]
