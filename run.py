from rlhf_suite.cli.__main__ import command

if __name__ == "__main__":
    command()
