"""Models: loading and preparing them, the one forward pass, and writing their weights.

Read `forward.py` first: every model runs through its one forward pass, with the attention of `attention.py` and the
head of `head.py`. `load.py` makes models from folders, `prepare.py` prepares them for training, and `weights.py` and
`save.py` write them. Models with a task of their own are in `chat_model`, `reward_model` and `process_reward_model`.
"""
