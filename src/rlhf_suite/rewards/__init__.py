"""Where scores come from: `rules` built in, a user's `file`; both run in the killable process of `pool`."""
