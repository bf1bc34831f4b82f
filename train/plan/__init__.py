"""What a recipe takes in memory, disk and time, before it is run; enter at `plan.make_plan`, or `page.plan_page`."""
