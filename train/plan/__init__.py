"""What a recipe takes in memory and disk, before it is run; enter at `plan.make_plan`, or `page.plan_page`."""
