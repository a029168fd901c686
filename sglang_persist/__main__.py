from sglang_persist.cli import main

main()
