"""Whole journeys over the floors below."""
