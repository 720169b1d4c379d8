"""Sources of rewards: built-in rules, a user's file, HTTP servers, models. Rules and files run in their own process."""
