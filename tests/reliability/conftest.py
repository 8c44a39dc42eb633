import sys
from pathlib import Path

# importlib mode adds no folder to the path; processes.py is shared by the tests here and imported by their children
sys.path.insert(0, str(Path(__file__).parent))
