"""Every rank in one picture: what to show (pure), the widget, the page of its own, the terminal screen."""
