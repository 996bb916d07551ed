"""Turnover by item: net prices, without tax. Usage: report.py"""

import csv

total = 0.0
with open("orders.csv") as orders:
    for row in csv.DictReader(orders):
        total += int(row["count"]) * float(row["price"])
print(f"{total:.2f}")
