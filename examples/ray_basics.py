"""Ray's tasks, object store and resources in five steps, and when they do not pay.

python examples/ray_basics.py          # once before: pip install -r requirements-ray.txt

remote() gives a reference at once, get() waits for its value:
   0.71 s  4 tasks of 0.5 s, then one get() of all
   2.02 s  the same, get() in the loop: each ends before the next starts
wait() gives what is ready, where get() would wait for the slowest:
           the task of 0.3 s
           the task of 0.6 s
           the task of 0.9 s
put() stores an argument once, else each call stores a copy of its own:
   0.46 s  10 tasks with an array of 32 MB
   0.06 s  10 tasks with a reference to it from put()
a task waits until the resources that it asks for are free:
   0.51 s  4 tasks of 0.5 s with num_cpus=1, on 4 CPUs
   1.01 s  4 tasks of 0.5 s with num_cpus=2, on 4 CPUs
   2.02 s  4 tasks of 0.5 s with num_cpus=4, on 4 CPUs
a task costs milliseconds, so too small a batch does not pay:
   0.00 s  1,000 sums here
   2.40 s  1,000 sums in a task each
   0.02 s  1,000 sums in 4 tasks
"""

import lesson

import numpy as np
from workloads import add_up, pause, timed


def main() -> None:
    with lesson.local_ray(cpu_num=4) as ray:
        nap, add = ray.remote(pause), ray.remote(add_up)
        ray.get([nap.remote(0.5) for _ in range(4)])  # starts four processes

        print("remote() gives a reference at once, get() waits for its value:")
        with timed("4 tasks of 0.5 s, then one get() of all"):
            ray.get([nap.remote(0.5) for _ in range(4)])
        with timed("the same, get() in the loop: each ends before the next starts"):
            for _ in range(4):
                ray.get(nap.remote(0.5))
        print("wait() gives what is ready, where get() would wait for the slowest:")
        running = [nap.remote(seconds) for seconds in (0.9, 0.3, 0.6)]
        while running:
            (ready,), running = ray.wait(running)
            print(f"           the task of {ray.get(ready)} s")
        print("put() stores an argument once, else each call stores a copy of its own:")
        numbers = np.ones(4_000_000)
        with timed("10 tasks with an array of 32 MB"):
            ray.get([add.remote(numbers) for _ in range(10)])
        with timed("10 tasks with a reference to it from put()"):
            reference = ray.put(numbers)
            ray.get([add.remote(reference) for _ in range(10)])
        print("a task waits until the resources that it asks for are free:")
        for cpus in (1, 2, 4):
            with timed(f"4 tasks of 0.5 s with num_cpus={cpus}, on 4 CPUs"):
                ray.get([nap.options(num_cpus=cpus).remote(0.5) for _ in range(4)])
        print("a task costs milliseconds, so too small a batch does not pay:")
        rows = np.ones((1_000, 1_000))
        with timed("1,000 sums here"):
            expected = [add_up(row) for row in rows]
        with timed("1,000 sums in a task each"):
            assert ray.get([add.remote(row) for row in rows]) == expected
        with timed("1,000 sums in 4 tasks"):
            assert sum(ray.get([add.remote(part) for part in np.array_split(rows, 4)])) == sum(expected)


if __name__ == "__main__":
    main()
