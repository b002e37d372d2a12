"""The adapter is a package of its own, with a module `test_util` that holds no tests."""

collect_ignore = ["adapter"]
