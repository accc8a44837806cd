from sqlalchemy import Column, Integer, MetaData, Table

metadata = MetaData()
orders = Table("orders", metadata, Column("number", Integer, primary_key=True))
