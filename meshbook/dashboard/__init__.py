"""The dashboard of a mesh: its messages (pure), the widget, the web page, the terminal screen."""
