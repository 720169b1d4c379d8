"""From the words of a command line to a configuration: presets, overrides and files of flags, composed by Hydra."""
