"""`python -m squinchcomm` is `squinchcomm`."""

from squinchcomm.cli import main

if __name__ == "__main__":
    main()
