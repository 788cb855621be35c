"""`python -m squinchcomm.cli` is `squinchcomm`, too."""

from squinchcomm.cli import main

if __name__ == "__main__":
    main()
