import sys
from pathlib import Path

# importlib mode adds no folder to the path; the broken blocks are also named by _target_ in a YAML, as a user's are
sys.path.insert(0, str(Path(__file__).parent))
