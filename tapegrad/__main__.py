"""``python -m tapegrad`` is ``tapegrad``."""

from tapegrad.profile.cli import main

if __name__ == "__main__":
    main(prog_name="tapegrad")
