"""Our storages behind the interfaces of other libraries; each module needs its library when used."""
