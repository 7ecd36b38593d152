"""The data sets that `valor data prepare` knows, one declarative recipe each."""

from valor.data.recipes import gym, hub
from valor.data.recipes.recipe import Recipe
from valor.errors import UserError, did_you_mean

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (*hub.RECIPES, gym.COUNTDOWN)}


def find_recipe(name: str) -> Recipe:
    """The recipe of this name, or of a reasoning-gym task. Raises UserError that names the known ones."""
    if name.startswith(gym.PREFIX):
        return gym.recipe(name.removeprefix(gym.PREFIX))
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or "."
        raise UserError(
            f"no data set '{name}'{hint} There are: {', '.join(RECIPES)}, {gym.PREFIX}TASK, and custom for your own"
        )
    return RECIPES[name]
