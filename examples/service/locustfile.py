# SPDX-License-Identifier: Apache-2.0
"""Loads the service with clients that send requests of one to eight images without a pause.

pip install locust
locust -f examples/service/locustfile.py --headless --users 16 --run-time 30s \
    --host http://127.0.0.1:8080
"""

import random

from locust import HttpUser, constant, task


class Client(HttpUser):
    wait_time = constant(0)

    @task
    def classify(self) -> None:
        images = [[random.randrange(256) for _ in range(64)] for _ in range(random.randint(1, 8))]
        with self.client.post("/", json=images, catch_response=True) as answer:
            if answer.status_code == 503:
                answer.success()  # overload is an answer, too
            elif answer.status_code != 200 or len(answer.json()["classes"]) != len(images):
                answer.failure(answer.text)
