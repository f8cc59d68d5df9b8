"""Where tasks come from: files, procedural generators, mixtures of both. `TASKS` holds the names a recipe may use."""

from renma.registry import Registry

TASKS = Registry(
    "task source",
    {
        "arithmetic": "renma.tasks.procedural:ArithmeticTasks",
        "reasoning_gym": "renma.tasks.procedural:ReasoningGymTasks",
        "jsonl": "renma.tasks.files:JsonlTasks",
        "word_problems": "renma.tasks.word_problems:WordProblems",
        "mixture": "renma.tasks.mixture:Mixture",
    },
)
